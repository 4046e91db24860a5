# SPDX-License-Identifier: Apache-2.0
"""fp4lt inside serving engines.  Nothing here imports an engine before the engine itself asks."""
