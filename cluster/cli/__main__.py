"""`python -m cluster.cli`: the same as `forebay`."""

from forebay.cluster.cli import main

if __name__ == "__main__":
    main()
