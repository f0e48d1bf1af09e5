"""Pure functions on flat tensors, (T,) with lengths (B,). Testable without Ray; each cites its paper and equation."""
