"""Parts of Forebay that use files, processes and the network: configuration, controller, API, client, agent, CLI."""
