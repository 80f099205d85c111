"""How two models' caches correspond: CKA, R2, effective rank, head alignment."""
