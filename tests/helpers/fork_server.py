"""The server that ranks and scripts are forked from, with torch loaded: one per worker of the tests."""

import multiprocessing
from functools import cache
from multiprocessing.context import ForkServerContext

# What most ranks load anyway (any optimizer step imports torch._dynamo), or some for a second (what compiles imports
# inductor): once in the server instead of once per rank and test.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "hypothesis",
    "pytest",
    "legacy_ddp._wrapper",
    "tests.helpers.rank_process",
]


@cache
def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context
