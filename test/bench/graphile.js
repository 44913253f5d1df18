// Process jobs with graphile-worker, one statement each: graphile.js JOBS BATCH.
// With a batch of more than 1 it fetches so many jobs at once, and completes them
// together, too.
const { run, Logger } = require('graphile-worker');
const { Pool } = require('pg');

const [jobs, batch] = process.argv.slice(2).map(Number);
const batches = batch > 1 ? { localQueue: { size: batch }, completeJobBatchDelay: 0, failJobBatchDelay: 0 } : {};

const pool = new Pool({ max: jobs + 4 });
pool.on('error', error => console.error(error));
pool.on('connect', client => client.on('error', error => console.error(error)));

run({
	pgPool: pool,
	preset: { worker: { concurrentJobs: jobs, logger: new Logger(() => () => {}), ...batches } },
	taskList: {
		bench: async (payload, helpers) => {
			await helpers.query('SELECT effect($1)', [payload.n]);
		},
	},
}).then(
	runner => {
		console.log('running');
		return runner.promise;
	},
	error => {
		console.error(error);
		process.exit(1);
	});
