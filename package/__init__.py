"""eaglet: speculative decoding that you can check. This is what `import eaglet` gives after `pip install .`.

import eaglet
engine = eaglet.load()                                # the demo model; a folder, .gguf file or org/name for another one
for chunk in engine.generate("def main():\\n", eaglet.SamplingParams(max_new_tokens=100)):
    print(chunk.text, end="")
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoding.params import SamplingParams
    from engine.engine import Engine
    from engine.grammar_text import json_grammar
    from engine.load import load
    from generate import VERSION as __version__
    from loading.options import DEMO

__all__ = ["DEMO", "Engine", "SamplingParams", "__version__", "json_grammar", "load"]

HOMES = {  # name -> its module in the package, and its name there
    "DEMO": ("loading.options", "DEMO"),
    "Engine": ("engine.engine", "Engine"),
    "SamplingParams": ("decoding.params", "SamplingParams"),
    "__version__": ("generate", "VERSION"),
    "json_grammar": ("engine.grammar_text", "json_grammar"),
    "load": ("engine.load", "load"),
}
if not TYPE_CHECKING:  # a type checker would accept any name because of this function

    def __getattr__(name: str) -> Any:
        """Everything is imported when it is first named: torch takes seconds, and the command `eaglet` starts here."""
        if name not in HOMES:
            raise AttributeError(f"eaglet has no {name!r}; it has {', '.join(HOMES)}.")
        module, attribute = HOMES[name]
        return vars(importlib.import_module(f"{__name__}.{module}"))[attribute]
