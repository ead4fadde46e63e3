"""The command line of edge_llm: thin verbs over the library. Importing it is quick; each verb imports what it needs."""
