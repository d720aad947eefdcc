"""How an answer is told: one module for each API."""
