"""Token-in, token-out: sessions that own the tokens of multi-turn episodes (DESIGN 4.8)."""
