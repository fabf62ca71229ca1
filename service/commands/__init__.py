"""What each subcommand of ``eyas`` does; imported only when it is called."""
