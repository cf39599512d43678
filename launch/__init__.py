"""The command line: every subcommand, the local cluster, and what a run writes for people."""
