"""The correspondence of two models' caches: CKA, R2, effective rank, head alignment."""
