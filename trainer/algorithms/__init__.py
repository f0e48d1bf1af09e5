"""Algorithms: pure functions on flat tensors, (T,) with lengths (B,). None needs Ray; each cites its paper and equation."""
