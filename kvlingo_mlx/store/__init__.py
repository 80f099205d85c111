"""Translators that are kept: listed, imported, published, looked after."""
