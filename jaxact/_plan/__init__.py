"""Decide how each residual is stored: plans, and the facts that they rest on."""
