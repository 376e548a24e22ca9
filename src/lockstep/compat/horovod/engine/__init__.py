"""Negotiates which operations all ranks have submitted, in any order, and executes them."""
