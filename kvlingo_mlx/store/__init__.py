"""The local store of translators: listing, importing, publishing and diagnosis."""
