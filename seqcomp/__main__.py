"""``python -m seqcomp`` is the command ``seqcomp``."""

from seqcomp.cli import main

if __name__ == "__main__":
    main()
