"""Models that ``tools/convert_mla.py`` made: grouped-query attention turned into latent attention.

``on_mlx`` tells mlx-lm and the package of them, ``on_torch`` transformers and training
(docs/decisions/023); the package alone refuses them. ``python -m benchmarks.paper.converted_mla
VERB ...`` is ``kvlingo-mlx`` with both registered.
"""

MODEL_TYPE = "converted_mla"
