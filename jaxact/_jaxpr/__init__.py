"""Read and rewrite traced programs (jaxprs)."""
