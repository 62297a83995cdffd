"""A deep model whose stages live on different peers, several peers per stage."""
