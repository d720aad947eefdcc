"""The tables of a catalog, format 2. docs/format.md explains them; the dataclasses of rows.py mirror them."""

from __future__ import annotations

from typing import Final

FORMAT: Final = 2
"""Written to PRAGMA user_version. A program refuses a catalog of any other format than this one, by name."""

APPLICATION_ID: Final = 0x6B766D6D  # "kvmm", PRAGMA application_id: what `file` shows of a catalog

SCHEMA: Final = """
CREATE TABLE meta(
  key TEXT PRIMARY KEY, value TEXT NOT NULL, row_xxh INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE workspaces(
  id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, lineage INTEGER NOT NULL UNIQUE, n_tokens INTEGER NOT NULL,
  commits INTEGER NOT NULL, policy TEXT NOT NULL, system TEXT, created REAL NOT NULL, used REAL NOT NULL,
  n_steps INTEGER NOT NULL, n_pins INTEGER NOT NULL, row_xxh INTEGER NOT NULL) WITHOUT ROWID;

-- AUTOINCREMENT: a number is never used twice, so a file left of a deleted lineage cannot pass as another's.
CREATE TABLE lineages(
  id INTEGER PRIMARY KEY AUTOINCREMENT, parent INTEGER, parent_end INTEGER NOT NULL,
  parent_blocks INTEGER NOT NULL, own_start INTEGER NOT NULL, parent_steps INTEGER NOT NULL,
  created REAL NOT NULL, row_xxh INTEGER NOT NULL);

CREATE TABLE tokens(
  lineage INTEGER NOT NULL, chunk INTEGER NOT NULL, ids BLOB NOT NULL, row_xxh INTEGER NOT NULL,
  PRIMARY KEY(lineage, chunk));

CREATE TABLE blocks(
  lineage INTEGER NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, count INTEGER NOT NULL,
  tier INTEGER NOT NULL, segment INTEGER, slot INTEGER, generation INTEGER, checksum BLOB NOT NULL,
  mean_xxh BLOB NOT NULL, origin INTEGER NOT NULL, row_xxh INTEGER NOT NULL,
  PRIMARY KEY(lineage, number)) WITHOUT ROWID;
-- Also a guard: no two blocks can ever name the same slot.
CREATE UNIQUE INDEX blocks_by_slot ON blocks(segment, slot) WHERE segment IS NOT NULL;

CREATE TABLE texts(
  lineage INTEGER NOT NULL, number INTEGER NOT NULL, text TEXT NOT NULL, row_xxh INTEGER NOT NULL,
  PRIMARY KEY(lineage, number));

CREATE TABLE words(
  lineage INTEGER NOT NULL, number INTEGER NOT NULL, source BLOB NOT NULL, terms BLOB NOT NULL,
  row_xxh INTEGER NOT NULL, PRIMARY KEY(lineage, number)) WITHOUT ROWID;

CREATE TABLE heat(
  lineage INTEGER NOT NULL, number INTEGER NOT NULL, recent REAL NOT NULL, total INTEGER NOT NULL,
  tick INTEGER NOT NULL, row_xxh INTEGER NOT NULL, PRIMARY KEY(lineage, number)) WITHOUT ROWID;

CREATE TABLE steps(
  lineage INTEGER NOT NULL, number INTEGER NOT NULL, kind TEXT NOT NULL, start INTEGER NOT NULL,
  "end" INTEGER NOT NULL, query_start INTEGER NOT NULL, answer TEXT NOT NULL, closed INTEGER NOT NULL,
  scorer TEXT NOT NULL, options TEXT NOT NULL, time REAL NOT NULL, row_xxh INTEGER NOT NULL,
  PRIMARY KEY(lineage, number));

CREATE TABLE pins(
  workspace TEXT NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, "end" INTEGER NOT NULL,
  row_xxh INTEGER NOT NULL, PRIMARY KEY(workspace, number)) WITHOUT ROWID;

CREATE TABLE ahead(
  workspace TEXT NOT NULL, number INTEGER NOT NULL, start INTEGER NOT NULL, count INTEGER NOT NULL,
  segment INTEGER NOT NULL, slot INTEGER NOT NULL, generation INTEGER NOT NULL, checksum BLOB NOT NULL,
  ids BLOB NOT NULL, row_xxh INTEGER NOT NULL, PRIMARY KEY(workspace, number));

CREATE TABLE segments(
  number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT, n_slots INTEGER NOT NULL, row_xxh INTEGER NOT NULL);

CREATE TABLE slots(
  segment INTEGER NOT NULL, slot INTEGER NOT NULL, generation INTEGER NOT NULL, used INTEGER NOT NULL,
  row_xxh INTEGER NOT NULL, PRIMARY KEY(segment, slot)) WITHOUT ROWID;
"""
