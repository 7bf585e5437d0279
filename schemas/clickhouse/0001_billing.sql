-- Usage and money. Amounts are integer nano-USD, times are UTC, months are YYYYMM.
--
-- Every column of an ORDER BY or PARTITION BY follows from the identity of its row, never from the moment of
-- the insert: repeated rows meet in one partition and collapse. People read the views, never the tables under
-- them. A statement ends with a semicolon at the end of a line, and can be repeated.

CREATE TABLE IF NOT EXISTS billing.usage_events (
  org_id            String,
  billing_month     UInt32 COMMENT 'UTC month in which the batch was created; of a correction, the month it is made',
  batch_id          String,
  request_index     UInt32,
  entry_id          String COMMENT 'usage | usage:<step>:<request id> | adj_<ulid>',
  kind              Enum8('usage' = 1, 'adjustment' = 2, 'credit' = 3),
  model             LowCardinality(String),
  endpoint          LowCardinality(String),
  tier              LowCardinality(String) COMMENT 'standard | expedited',
  api_key_id        LowCardinality(String),
  completed_at      DateTime64(3, 'UTC'),
  input_tokens      Int64 COMMENT 'cached ones included; corrections may be negative',
  cached_tokens     Int64,
  output_tokens     Int64,
  price_id          LowCardinality(String),
  cost_input_nano   Int64,
  cost_output_nano  Int64,
  cost_nano_usd     Int64,
  corrects          String DEFAULT '',
  reason            LowCardinality(String) DEFAULT '',
  actor             LowCardinality(String) DEFAULT '',
  output_offset     UInt64 COMMENT 'offset of the accepted result; of several rows with one identity the lowest holds',
  usage_topic       LowCardinality(String),
  usage_partition   Int32,
  usage_offset      Int64,
  ingested_at       DateTime64(3, 'UTC') DEFAULT now64(3),
  first_wins        UInt64 MATERIALIZED 18446744073709551615 - output_offset,
  CONSTRAINT cost_adds_up CHECK cost_nano_usd = cost_input_nano + cost_output_nano,
  CONSTRAINT usage_not_negative CHECK kind != 'usage'
    OR (input_tokens >= 0 AND cached_tokens >= 0 AND cached_tokens <= input_tokens
        AND output_tokens >= 0 AND cost_input_nano >= 0 AND cost_output_nano >= 0)
)
ENGINE = ReplacingMergeTree(first_wins)
PARTITION BY billing_month
PRIMARY KEY (org_id, billing_month, batch_id)
ORDER BY (org_id, billing_month, batch_id, request_index, entry_id)
SETTINGS non_replicated_deduplication_window = 10000;

-- Usage that could not be billed as it came: answers without usable usage, and messages that make no sense.
-- A message of topic `usage` holds many rows, so an identified row is known by its own identity and only the
-- rest by its place in Kafka. Resolving one is inserting it again with resolved_at set.
CREATE TABLE IF NOT EXISTS billing.usage_rejects (
  org_id           String DEFAULT '',
  batch_id         String DEFAULT '',
  request_index    UInt32 DEFAULT 0,
  entry_id         String DEFAULT '',
  model            LowCardinality(String) DEFAULT '',
  usage_topic      LowCardinality(String),
  usage_partition  Int32,
  usage_offset     Int64,
  reason           LowCardinality(String),
  detail           String DEFAULT '',
  raw              String DEFAULT '' CODEC(ZSTD(3)),
  rejected_at      DateTime64(3, 'UTC') DEFAULT now64(3),
  resolved_by      LowCardinality(String) DEFAULT '',
  resolved_at      DateTime64(3, 'UTC') DEFAULT toDateTime64(0, 3, 'UTC') COMMENT 'the epoch while it is open',
  place            String MATERIALIZED if(batch_id != '', '',
                     concat(usage_topic, ':', toString(usage_partition), ':', toString(usage_offset))),
  resolved_wins    UInt64 MATERIALIZED toUInt64(toUnixTimestamp64Milli(resolved_at))
)
ENGINE = ReplacingMergeTree(resolved_wins)
ORDER BY (org_id, batch_id, request_index, entry_id, place);

CREATE TABLE IF NOT EXISTS billing.batches (
  org_id          String,
  billing_month   UInt32,
  batch_id        String,
  status          LowCardinality(String),
  is_terminal     Bool,
  created_at      DateTime64(3, 'UTC'),
  ended_at        Nullable(DateTime64(3, 'UTC')),
  model           LowCardinality(String) DEFAULT '',
  endpoint        LowCardinality(String) DEFAULT '',
  tier            LowCardinality(String) DEFAULT '',
  api_key_id      LowCardinality(String) DEFAULT '',
  total           UInt32,
  completed       UInt32,
  failed          UInt32,
  billed_records  UInt32 COMMENT 'records with at least one billed call, counted by the arbiter',
  input_tokens    Int64,
  cached_tokens   Int64,
  output_tokens   Int64,
  cost_nano_usd   Int64,
  seq             UInt64 COMMENT 'grows with every version of the batch'
)
ENGINE = ReplacingMergeTree(seq)
PARTITION BY billing_month
ORDER BY (org_id, billing_month, batch_id);

CREATE TABLE IF NOT EXISTS billing.prices (
  price_id             String,
  model                LowCardinality(String),
  tier                 LowCardinality(String),
  input_nano_per_mtok  UInt64,
  cached_nano_per_mtok UInt64,
  output_nano_per_mtok UInt64,
  bps                  UInt16 COMMENT 'share of the Sync rate, in hundredths of a percent',
  valid_from           DateTime64(3, 'UTC'),
  created_by           String,
  created_at           DateTime64(3, 'UTC') DEFAULT now64(3)
)
ENGINE = ReplacingMergeTree
ORDER BY (model, tier, valid_from, price_id);

CREATE TABLE IF NOT EXISTS billing.invoice_lines (
  org_id         String,
  invoice_id     String,
  invoice_month  UInt32,
  usage_month    UInt32,
  line_class     Enum8('usage' = 1, 'prior_period' = 2, 'credit' = 3),
  model          LowCardinality(String),
  tier           LowCardinality(String),
  requests       Int64,
  input_tokens   Int64,
  cached_tokens  Int64,
  output_tokens  Int64,
  cost_nano_usd  Int64,
  issued_at      DateTime64(3, 'UTC') DEFAULT now64(3),
  late_loses     UInt64 MATERIALIZED 18446744073709551615 - toUInt64(toUnixTimestamp64Milli(issued_at))
)
ENGINE = ReplacingMergeTree(late_loses)
PARTITION BY invoice_month
ORDER BY (org_id, invoice_month, invoice_id, usage_month, line_class, model, tier);

CREATE VIEW IF NOT EXISTS billing.usage AS
SELECT * FROM billing.usage_events FINAL;

CREATE VIEW IF NOT EXISTS billing.open_rejects AS
SELECT * FROM billing.usage_rejects FINAL WHERE resolved_by = '';

-- What is owed and on no invoice yet: the ledger minus every invoice line.
CREATE VIEW IF NOT EXISTS billing.unbilled AS
SELECT org_id, usage_month, if(k = 'credit', 'credit', 'usage') AS cls, model, tier,
       toInt64(sum(n)) AS requests, toInt64(sum(i)) AS input_tokens, toInt64(sum(h)) AS cached_tokens,
       toInt64(sum(o)) AS output_tokens, toInt64(sum(c)) AS cost_nano_usd
FROM (
  SELECT org_id, billing_month AS usage_month, toString(kind) AS k, model, tier,
         toInt128(countIf(kind = 'usage')) AS n, sum(toInt128(input_tokens)) AS i,
         sum(toInt128(cached_tokens)) AS h, sum(toInt128(output_tokens)) AS o, sum(toInt128(cost_nano_usd)) AS c
  FROM billing.usage_events FINAL
  GROUP BY org_id, usage_month, k, model, tier
  UNION ALL
  SELECT org_id, usage_month, if(line_class = 'credit', 'credit', 'usage') AS k, model, tier,
         -sum(toInt128(requests)), -sum(toInt128(input_tokens)), -sum(toInt128(cached_tokens)),
         -sum(toInt128(output_tokens)), -sum(toInt128(cost_nano_usd))
  FROM billing.invoice_lines FINAL
  GROUP BY org_id, usage_month, k, model, tier
)
GROUP BY org_id, usage_month, cls, model, tier
HAVING requests != 0 OR input_tokens != 0 OR cached_tokens != 0 OR output_tokens != 0 OR cost_nano_usd != 0;

-- Empty at rest: ended batches whose counts or cost are not those of their rows, and rows of no batch.
CREATE VIEW IF NOT EXISTS billing.batch_mismatches AS
SELECT if(b.batch_id != '', b.org_id, l.org_id) AS org_id, if(b.batch_id != '', b.batch_id, l.batch_id) AS batch_id,
       b.status AS status, b.billed_records AS batch_records, l.records AS ledger_records,
       b.cost_nano_usd AS batch_cost, l.cost AS ledger_cost,
       b.input_tokens AS batch_input, l.i AS ledger_input, b.output_tokens AS batch_output, l.o AS ledger_output
FROM (SELECT * FROM billing.batches FINAL) AS b
FULL OUTER JOIN (
  SELECT org_id, batch_id, uniqExactIf(request_index, kind = 'usage') AS records,
         sumIf(input_tokens, kind = 'usage') AS i, sumIf(output_tokens, kind = 'usage') AS o,
         sumIf(cost_nano_usd, kind = 'usage') AS cost
  FROM billing.usage_events FINAL
  WHERE batch_id != ''
  GROUP BY org_id, batch_id
) AS l ON b.org_id = l.org_id AND b.batch_id = l.batch_id
WHERE (b.is_terminal OR b.batch_id = '')
  AND (b.billed_records != l.records OR b.cost_nano_usd != l.cost OR b.input_tokens != l.i OR b.output_tokens != l.o)
SETTINGS join_use_nulls = 0;

-- One identity with two sets of numbers; merges hide it, so look often.
CREATE VIEW IF NOT EXISTS billing.conflicting_duplicates AS
SELECT org_id, billing_month, batch_id, request_index, entry_id, count() AS copies,
       uniqExact(input_tokens, cached_tokens, output_tokens, cost_nano_usd, price_id) AS versions
FROM billing.usage_events
GROUP BY org_id, billing_month, batch_id, request_index, entry_id
HAVING versions > 1;

-- For charts: recomputed as a whole from FINAL, the newest refresh wins, months out of the window stay.
CREATE TABLE IF NOT EXISTS billing.usage_daily (
  org_id         String,
  billing_month  UInt32,
  day            Date,
  model          LowCardinality(String),
  tier           LowCardinality(String),
  api_key_id     LowCardinality(String),
  kind           LowCardinality(String),
  requests       UInt64,
  input_tokens   Int64,
  cached_tokens  Int64,
  output_tokens  Int64,
  cost_nano_usd  Int64,
  refreshed_at   DateTime64(3, 'UTC')
)
ENGINE = ReplacingMergeTree(refreshed_at)
PARTITION BY billing_month
ORDER BY (org_id, billing_month, day, model, tier, api_key_id, kind);

CREATE MATERIALIZED VIEW IF NOT EXISTS billing.usage_daily_refresh
REFRESH EVERY 5 MINUTE APPEND TO billing.usage_daily AS
SELECT org_id, billing_month, toDate(completed_at) AS day, model, tier, api_key_id, toString(kind) AS kind,
       countIf(usage_events.kind = 'usage') AS requests, sum(input_tokens) AS input_tokens,
       sum(cached_tokens) AS cached_tokens, sum(output_tokens) AS output_tokens,
       sum(cost_nano_usd) AS cost_nano_usd, now64(3) AS refreshed_at
FROM billing.usage_events FINAL
WHERE billing_month >= toYYYYMM(now() - INTERVAL 40 DAY)
GROUP BY org_id, billing_month, day, model, tier, api_key_id, kind;

CREATE TABLE IF NOT EXISTS billing.lag_samples (
  sampled_at     DateTime('UTC'),
  group_id       LowCardinality(String),
  topic          LowCardinality(String),
  partition      Int32,
  committed      Int64 COMMENT 'next offset the group will read; -1 when it has committed none',
  end_offset     Int64,
  lag            Int64
)
ENGINE = ReplacingMergeTree
PARTITION BY toYYYYMMDD(sampled_at)
ORDER BY (group_id, topic, partition, sampled_at)
TTL sampled_at + INTERVAL 30 DAY;
