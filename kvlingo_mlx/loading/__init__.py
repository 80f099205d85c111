"""From a name to a model or a translator that fits."""
