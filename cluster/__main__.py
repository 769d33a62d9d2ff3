"""`python -m cluster`: the same as the `tandem` command."""

from cluster.cli.entry import main

if __name__ == "__main__":
    main()
