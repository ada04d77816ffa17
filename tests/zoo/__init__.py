"""Model architectures under every strategy: what is exact and what is refused."""
