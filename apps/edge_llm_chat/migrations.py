"""The database's schema, step by step; `PRAGMA user_version` says how many steps a file has seen. Steps are never changed."""

from __future__ import annotations

MIGRATIONS = (
    """
    CREATE TABLE conversation (
        id INTEGER PRIMARY KEY,
        title TEXT NOT NULL,
        system TEXT,
        model TEXT NOT NULL,
        parameters TEXT NOT NULL,
        pinned INTEGER NOT NULL DEFAULT 0,
        created REAL NOT NULL,
        updated REAL NOT NULL
    );
    CREATE INDEX conversation_order ON conversation (pinned DESC, updated DESC);
    CREATE TABLE tag (
        conversation INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE,
        name TEXT NOT NULL,
        PRIMARY KEY (conversation, name)
    ) WITHOUT ROWID;
    CREATE TABLE turn (
        key INTEGER PRIMARY KEY,
        conversation INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE,
        id INTEGER NOT NULL,
        parent INTEGER,
        shown INTEGER NOT NULL,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        details TEXT NOT NULL,
        created REAL NOT NULL,
        UNIQUE (conversation, id)
    );
    CREATE VIRTUAL TABLE turn_text USING fts5 (content, content=turn, content_rowid=key, tokenize=trigram);
    CREATE TRIGGER turn_added AFTER INSERT ON turn BEGIN
        INSERT INTO turn_text (rowid, content) VALUES (new.key, new.content);
    END;
    CREATE TRIGGER turn_removed AFTER DELETE ON turn BEGIN
        INSERT INTO turn_text (turn_text, rowid, content) VALUES ('delete', old.key, old.content);
    END;
    CREATE TRIGGER turn_changed AFTER UPDATE OF content ON turn BEGIN
        INSERT INTO turn_text (turn_text, rowid, content) VALUES ('delete', old.key, old.content);
        INSERT INTO turn_text (rowid, content) VALUES (new.key, new.content);
    END;
    CREATE TABLE setting (
        name TEXT PRIMARY KEY,
        value TEXT NOT NULL
    );
    CREATE TABLE prompt (
        name TEXT PRIMARY KEY,
        text TEXT NOT NULL
    );
    """,
)
