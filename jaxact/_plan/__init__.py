"""What becomes of each residual: plans, and what they are made from."""
