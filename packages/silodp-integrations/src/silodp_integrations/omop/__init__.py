"""Tables of the OMOP Common Data Model, 5.3 and 5.4: a definition of rows and columns becomes a public query.

Nothing here reads a record for training: the query is read by `silodp_integrations.databases`.
"""
