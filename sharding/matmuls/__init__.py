"""Quantized matrix products: recipes, and which products of a loss they take."""

from sharding.matmuls._carried import ScaledParams as ScaledParams
from sharding.matmuls._grids import Grid as Grid
from sharding.matmuls._recipes import RECIPES as RECIPES
from sharding.matmuls._recipes import Quantizer as Quantizer
from sharding.matmuls._recipes import Recipe as Recipe
from sharding.matmuls._report import MatmulReport as MatmulReport
from sharding.matmuls._report import MatmulRow as MatmulRow
from sharding.matmuls._report import report_products as report_products
from sharding.matmuls._scaled_params import scaled_optimizer as scaled_optimizer
from sharding.matmuls._scaled_params import scaled_params as scaled_params

__all__ = [name for name in dir() if not name.startswith("_")]
__dir__ = __all__.copy
