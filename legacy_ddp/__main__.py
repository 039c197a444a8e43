"""Entry point of ``python -m legacy_ddp``, the same as ``legacy-ddp``."""

from legacy_ddp.debug._cli import main

raise SystemExit(main())
