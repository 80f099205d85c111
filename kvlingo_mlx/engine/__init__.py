"""Lines of tokens, how they grow from one another, and how answers are decoded from them."""
