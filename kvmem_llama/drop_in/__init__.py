"""llama_cpp.Llama over an engine of ours: scripts that were written for it change one import."""
