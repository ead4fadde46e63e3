"""Running the tools that a model asks for, with the model as the attacker."""
