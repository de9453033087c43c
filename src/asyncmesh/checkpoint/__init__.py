"""The weights a run ends with, on disk. Safetensors and JSON only: nothing here can run code."""
