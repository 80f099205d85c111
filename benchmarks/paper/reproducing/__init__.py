"""The paper's tables and figures: made anew by label, laid beside the paper's numbers."""
