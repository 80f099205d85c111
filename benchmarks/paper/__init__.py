"""The paper's tables and figures: all that is needed for them alone; used from a checkout."""
