"""`python -m cluster`: the `tandem` command."""

from cluster.cli.entry import main

if __name__ == "__main__":
    main()
