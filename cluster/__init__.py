"""Everything of Forebay that crosses a machine boundary: configuration, controller, API, client, agent, CLI."""
