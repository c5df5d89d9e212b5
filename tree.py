"""The names of `trees`. TorchDynamo skips any file called tree.py (it takes it for the dm-tree package), so
no code may live here."""

from trees import *  # noqa: F403
