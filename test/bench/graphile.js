// Process jobs with graphile-worker, one statement each.
const { run } = require('graphile-worker');
const { Pool } = require('pg');

const concurrency = Number(process.argv[2]);

run({
	pgPool: new Pool({ max: concurrency + 2 }),
	concurrency,
	logger: new (require('graphile-worker').Logger)(() => () => {}),
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
