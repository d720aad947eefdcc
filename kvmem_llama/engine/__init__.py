"""Weights, context and the one owner thread that runs llama.cpp: sequences, batches, sampling."""
