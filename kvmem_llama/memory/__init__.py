"""The method: blocks, their index and scores, selection, the view and the step. Import the submodules."""
