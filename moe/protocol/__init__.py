"""What callers and servers of experts share: names, schemas, tensors, calls, declarations."""
