"""Eyas engine: speculative decoding for MLA models. Token ids only; knows nothing of text or HTTP."""
