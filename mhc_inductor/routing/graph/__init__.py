# SPDX-License-Identifier: Apache-2.0
"""A Dynamo graph as ATen values, indices and expressions. Nothing here knows a specific operator."""
