"""From names to models, and to translators that fit them."""
