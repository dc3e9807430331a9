"""Configs of models that the lectures name, in HF's own keys: enough to count one, or to create it at random.

Sources: the papers of GPT-3 (Brown et al. 2020, table 2.1) and of the Transformer (Vaswani et al. 2017, table 3, with a
shared vocabulary of 37,000), and the configs that were published with the others.  They stand in `named_configs.toml`.
"""

from collections.abc import Mapping
from typing import Any

from triptych.files import tables_of

NAMED: Mapping[str, Mapping[str, Any]] = tables_of(__file__)
