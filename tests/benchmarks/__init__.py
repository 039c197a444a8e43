"""Tests of the benchmarks. The scripts find their neighbours because Python puts the folder of a script there."""

import sys

from tests.helpers.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))
