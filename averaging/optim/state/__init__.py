"""The training state: views, snapshots, checkpoints, and its transfer between peers."""
