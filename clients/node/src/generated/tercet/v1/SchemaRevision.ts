// Original file: ../../protos/tercet/v1/common.proto

export const SchemaRevision = {
  SCHEMA_REVISION_UNSPECIFIED: 'SCHEMA_REVISION_UNSPECIFIED',
  SCHEMA_REVISION_ONE: 'SCHEMA_REVISION_ONE',
} as const;

export type SchemaRevision =
  | 'SCHEMA_REVISION_UNSPECIFIED'
  | 0
  | 'SCHEMA_REVISION_ONE'
  | 1

export type SchemaRevision__Output = typeof SchemaRevision[keyof typeof SchemaRevision]
