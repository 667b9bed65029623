"""Store residuals through codecs: `custom_vjp` over flat arrays."""
