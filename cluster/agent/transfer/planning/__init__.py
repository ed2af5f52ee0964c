"""What a transfer has to do and where: the fence, paths of records, the walk, and the plan that they lead to."""
