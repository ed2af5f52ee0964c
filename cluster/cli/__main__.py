"""`python -m cluster.cli`: the same as `forebay`."""

from cluster.cli.app import main

if __name__ == "__main__":
    main()
