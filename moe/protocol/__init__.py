"""The protocol that callers and servers of experts share: names, schemas, tensors, calls and declarations."""
